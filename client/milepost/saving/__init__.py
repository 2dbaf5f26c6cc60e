"""One save on the trainer, step by step: its place in the ledger, its layout, and `prepare()`.

Knows the daemon's session, the slots and the state's content. `checkpointer` puts the steps in
order.
"""
