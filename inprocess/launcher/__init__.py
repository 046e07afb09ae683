"""`inprocess run`: starts the workers of a node, watches them, and replaces one that failed while the others go on.

Built on torch.distributed.elastic (its options, rendezvous, log files, error files); what differs from torchrun lives
here. Start to read in ``agent``.
"""
