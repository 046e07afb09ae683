"""A store in an etcd cluster. The code is in `inprocess.etcd.store`."""

from inprocess.etcd.store import EtcdStore

__all__ = ["EtcdStore"]
