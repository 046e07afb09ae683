"""Network adapters in a device tree made of files: which are near a GPU, and whether their links went down."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from inprocess.hardware import nic
from inprocess.hardware.nic import Link

GPU = "0000:4b:00.0"


class Tree:
    """A /sys with one GPU and the adapters that a test adds."""

    def __init__(self, path: Path, gpu: str = "pci0000:40/0000:4a:00.0", numa: str = "-1") -> None:
        self.path = path
        place = path / "devices" / gpu / GPU
        place.mkdir(parents=True)
        (place / "numa_node").write_text(f"{numa}\n")
        (path / "bus/pci/devices").mkdir(parents=True)
        (path / "bus/pci/devices" / GPU).symlink_to(place)
        (path / "class/infiniband").mkdir(parents=True)

    def adapter(self, name: str, place: str, numa: str = "-1") -> Path:
        """Its only port, active; place: its PCI path."""
        device = self.path / "devices" / place
        port = device / "infiniband" / name / "ports" / "1"
        (port / "counters").mkdir(parents=True)
        (self.path / "class/infiniband" / name).symlink_to(device / "infiniband" / name)
        (device / "infiniband" / name / "device").symlink_to(device)
        (device / "numa_node").write_text(f"{numa}\n")
        write(port / "state", "4: ACTIVE")
        write(port / "link_layer", "InfiniBand")
        write(port / "counters/link_downed", "0")
        return port

    def ethernet(self, port: Path, interface: str, downs: str) -> Path:
        """Makes a port one of RoCE; returns the interface's counter."""
        write(port / "link_layer", "Ethernet")
        write(port / "gid_attrs/ndevs/0", interface)
        counter = self.path / "class/net" / interface / "carrier_down_count"
        write(counter, downs)
        return counter

    def nearest(self) -> list[str]:
        return nic.nearest(self.path, GPU)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_the_same_switch_is_nearer_than_the_same_root(tree: Tree) -> None:
    tree.adapter("mlx5_0", "pci0000:40/0000:4a:00.0/0000:4c:00.0")
    tree.adapter("mlx5_1", "pci0000:40/0000:5a:00.0/0000:5c:00.0")
    tree.adapter("mlx5_2", "pci0000:80/0000:81:00.0")
    assert tree.nearest() == ["mlx5_0"]


def test_two_that_are_equally_near(tree: Tree) -> None:
    tree.adapter("mlx5_1", "pci0000:40/0000:5a:00.0/0000:5c:00.1")
    tree.adapter("mlx5_0", "pci0000:40/0000:5a:00.0/0000:5c:00.0")
    assert tree.nearest() == ["mlx5_0", "mlx5_1"]


def test_another_pci_root_of_the_same_numa_node(tmp_path: Path) -> None:
    tree = Tree(tmp_path, numa="1")
    tree.adapter("mlx5_0", "pci0000:20/0000:21:00.0", numa="0")
    tree.adapter("mlx5_1", "pci0000:80/0000:81:00.0", numa="1")
    assert tree.nearest() == ["mlx5_1"]


def test_nothing_says_which_is_near(tmp_path: Path) -> None:
    """A virtual machine whose devices have each a PCI root of their own, below the same bus that is none of PCI."""
    tree = Tree(tmp_path, gpu="LNXSYSTM:00/VMBUS:00/pci0001:00")
    tree.adapter("mlx5_0", "LNXSYSTM:00/VMBUS:00/pci0101:00/0101:00:00.0")
    assert tree.nearest() == ["mlx5_0"]
    tree.adapter("mlx5_1", "LNXSYSTM:00/VMBUS:00/pci0102:00/0102:00:00.0")
    assert tree.nearest() == []


def test_a_gpu_that_the_tree_does_not_show(tree: Tree) -> None:
    (tree.path / "bus/pci/devices" / GPU).unlink()
    assert tree.nearest() == []
    tree.adapter("mlx5_0", "pci0000:40/0000:4a:00.0/0000:4c:00.0")
    assert tree.nearest() == ["mlx5_0"]  # the only one
    shutil.rmtree(tree.path / "class")
    assert tree.nearest() == []


def test_virtual_functions(tree: Tree) -> None:
    """Beside their adapter they are left out; alone, as in a container, they are what there is."""
    whole = tree.adapter("mlx5_0", "pci0000:40/0000:4a:00.0/0000:4c:00.0")
    part = tree.adapter("mlx5_8", "pci0000:40/0000:4a:00.0/0000:4c:00.1")
    (part.parents[3] / "physfn").symlink_to(whole.parents[3])
    assert tree.nearest() == ["mlx5_0"]
    (tree.path / "class/infiniband/mlx5_0").unlink()
    assert tree.nearest() == ["mlx5_8"]


def test_ports_of_adapters(tree: Tree) -> None:
    port = tree.adapter("mlx5_0", "pci0000:40/0000:4c:00.0")
    shutil.copytree(port, port.with_name("2"))
    base = tree.path / "class/infiniband/mlx5_0/ports"
    assert nic.ports(tree.path, ["mlx5_0", "mlx5_9"]) == [base / "1", base / "2"]


def test_a_link_of_infiniband(tree: Tree) -> None:
    port = tree.adapter("mlx5_0", "pci0000:40/0000:4c:00.0")
    assert nic.read_link(tree.path, port) == Link("4: ACTIVE", {"link_downed": 0})
    (port / "counters/link_downed").unlink()
    assert nic.read_link(tree.path, port) == Link("4: ACTIVE", {})
    write(port / "hw_counters/link_downed", "3")
    assert nic.read_link(tree.path, port) == Link("4: ACTIVE", {"hw link_downed": 3})
    shutil.rmtree(port)
    assert nic.read_link(tree.path, port) is None


@pytest.mark.parametrize("interface", ["eth4", "bond0"])
def test_a_link_of_roce_is_counted_by_its_interface(tree: Tree, interface: str) -> None:
    port = tree.adapter("mlx5_bond_0", "pci0000:40/0000:4c:00.0")
    counter = tree.ethernet(port, interface, downs="7")
    assert nic.read_link(tree.path, port) == Link("4: ACTIVE", {"link_downed": 0, interface: 7})
    counter.unlink()  # in another network namespace
    assert nic.read_link(tree.path, port) == Link("4: ACTIVE", {"link_downed": 0})
    (port / "gid_attrs/ndevs/0").unlink()
    assert nic.read_link(tree.path, port) == Link("4: ACTIVE", {"link_downed": 0})


def test_a_state_that_cannot_be_read_is_not_a_port_that_is_gone(tree: Tree) -> None:
    port = tree.adapter("mlx5_0", "pci0000:40/0000:4c:00.0")
    (port / "state").unlink()
    (port / "state").mkdir()
    assert nic.read_link(tree.path, port) == Link("", {"link_downed": 0})


@pytest.mark.parametrize(
    ("before", "now", "down"),
    [
        (Link("4: ACTIVE", {}), Link("4: ACTIVE", {}), False),
        (Link("4: ACTIVE", {}), Link("1: DOWN", {}), True),
        (Link("4: ACTIVE", {}), Link("", {}), False),
        (Link("4: ACTIVE", {}), Link("5: ACTIVE_DEFER", {}), False),
        (Link("1: DOWN", {}), Link("1: DOWN", {}), False),
        (Link("1: DOWN", {}), None, True),
        (Link("4: ACTIVE", {"link_downed": 2}), Link("4: ACTIVE", {"link_downed": 3}), True),
        (Link("4: ACTIVE", {"link_downed": 2}), Link("4: ACTIVE", {"link_downed": 0}), False),  # it was reset
        (Link("4: ACTIVE", {"link_downed": 2}), Link("4: ACTIVE", {}), False),
        (Link("4: ACTIVE", {}), Link("4: ACTIVE", {"link_downed": 2}), False),
    ],
)
def test_went_down(before: Link, now: Link | None, down: bool) -> None:
    assert nic.went_down(before, now) is down
