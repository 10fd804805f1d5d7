"""Full weights while a model trains: in buckets, to a folder, a process group or shared memory."""
