"""optimize: from a Hugging Face checkpoint to a proven, runnable, compressed bundle.

Folders are listed in processing order: load, compress, export, lower, build, validate,
package, and harness, which runs what came out. `pipeline.py` is the whole flow on one page.
"""

__version__ = "0.1.0"
