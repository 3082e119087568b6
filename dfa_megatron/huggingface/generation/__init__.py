"""Generate with a distributed model: the cache stays where its tokens are, and every rank returns the same ids."""
