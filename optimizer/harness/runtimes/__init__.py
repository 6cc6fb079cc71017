"""One folder per runtime. Each has a Runner: infer(arrays by name) -> arrays by name, `.device`,
a context manager. A runtime's package is imported when a Runner is made, not before."""
