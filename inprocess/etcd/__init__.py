"""The ranks agree through an etcd cluster, in place of a store that a rank's monitor serves."""
