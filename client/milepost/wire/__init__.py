"""What travels between trainer, daemon and peers: messages, and the offers inside them.

Pure data, and never imports torch: nothing here has a clock, a file, a socket or a thread.
"""
