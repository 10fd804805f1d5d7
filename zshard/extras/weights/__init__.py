"""Full weights while a model trains: in buckets, to a folder or a process group."""
