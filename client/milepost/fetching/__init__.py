"""From a checkpoint's files into memory: reads what is wanted, checks it, and reads it once a
node.
"""
