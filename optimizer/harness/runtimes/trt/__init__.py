"""The TensorRT family: build an engine, and run it. Products differ in products.PRODUCTS only."""
