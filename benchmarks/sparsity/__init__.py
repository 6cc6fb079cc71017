"""Loss of decoders with half of their weights zero, beside other pruning tools."""
