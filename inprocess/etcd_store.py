"""A store in an etcd cluster. The code is in `inprocess.stores.etcd`."""

from inprocess.stores.etcd import EtcdStore

__all__ = ["EtcdStore"]
