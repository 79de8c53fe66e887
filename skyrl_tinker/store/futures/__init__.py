"""Life of a request: submitted once, read in order, finished once, fetched any number of times."""
