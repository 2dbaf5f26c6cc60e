"""The parts of a checkpoint that are not torch's. Never imports torch.

Where blobs lie in an image, the manifest, the order of checkpoints, and whether shards cover a
tensor.
"""
