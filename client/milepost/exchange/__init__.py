"""Between checkpoints and other formats: reads either one tensor by tensor, as a stream of bytes,
and writes files, which get their names only when they are whole.
"""
