"""Stage-to-stage transfer for multi-stage models, on structured concurrency."""
