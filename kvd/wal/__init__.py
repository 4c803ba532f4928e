"""The write-ahead log: records, segments, group commit, repair. Knows nothing of what a record means."""
