"""Between a checkpoint and other formats: what either holds, read as a stream of bytes, tensor by
tensor, and the files that are written from it, each of which gets its name only when it is whole.
"""
