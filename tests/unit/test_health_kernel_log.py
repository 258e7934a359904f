"""The kernel's log tells XIDs in every driver's form and the node's own troubles; noise tells nothing."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_health.data import rows
from stoker_health.kernel_log import KernelLog, Signal, address, read, read_all, stripped

XID79 = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def told(*lines: str) -> list[tuple[str, float | str | None, str]]:
    return [(s.result.check, s.result.value, s.result.entity) for s in read_all(lines)]


def one(line: str) -> Signal:
    [signal] = read_all([line])
    return signal


@pytest.mark.parametrize(
    ("line", "at"),
    [
        (f"3,1042,5123456789,-;{XID79}", 5123.456789),
        (f"[ 5123.456789] {XID79}", 5123.456789),
        (f"[Sun Feb 23 16:24:18 2025] {XID79}", 1740327858.0),
        (f"kern  :warn  : 2025-02-23T16:24:18,250000+00:00 {XID79}", 1740327858.25),
        (f"2025-02-23T17:24:18.250000+01:00 gpu-07 kernel: {XID79}", 1740327858.25),
        (f"Feb 23 16:24:18 gpu-07 kernel: [ 5123.456789] {XID79}", 5123.456789),
        (f"Feb 23 16:24:18 gpu-07 kernel: {XID79}", None),
        (f"[...] {XID79}", None),
        (XID79, None),
    ],
)
def test_whatever_logger_wrote_the_line_its_text_and_its_time_are_found(line: str, at: float | None) -> None:
    assert stripped(line).text == XID79
    signal = one(line)
    assert (signal.result.value, signal.result.entity, signal.result.severity) == (79.0, "pci:0000:3b:00", "fatal")
    assert signal.at == at


@pytest.mark.parametrize(
    ("line", "code", "entity"),
    [
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", 14.0, "pci:0000:03:00"),
        ("NVRM: Xid (PCI:0000:05:00): 79, GPU has fallen off the bus.", 79.0, "pci:0000:05:00"),
        ("NVRM: Xid (PCI:0000:98:00 GPU-I:05): 94, pid=7194, Contained: SM (0x1).", 94.0, "pci:0000:98:00"),
        ("NVRM: Xid (PCI:0018:01:00): 48, pid=1, An uncorrectable double bit error", 48.0, "pci:0018:01:00"),
        ("Xid (0000:AF:00): 31", 31.0, "pci:0000:af:00"),
    ],
)
def test_the_line_of_every_driver_generation_is_read(line: str, code: float, entity: str) -> None:
    assert told(line) == [("xid", code, entity)]


def test_a_gpu_off_the_bus_is_fatal_without_the_word_xid() -> None:
    three = (
        "NVRM: The NVIDIA GPU 0000:18:00.0",
        "NVRM: (PCI ID: 10de:2330) installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.",
    )
    assert told(*three) == [("xid", 79.0, "pci:0000:18:00")]
    assert told("NVRM: GPU 0000:18:00.0: GPU has fallen off the bus.") == [("xid", 79.0, "pci:0000:18:00")]
    assert told(*three, "[12.5] NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus.") == told(*three)


def test_the_gpu_is_named_by_its_uuid_where_the_log_or_the_node_knows_it() -> None:
    named = "NVRM: GPU at PCI:0000:3b:00: GPU-00000000-0000-0000-0000-000000000007"
    assert told(named, XID79)[0][2] == "GPU-00000000-0000-0000-0000-000000000007"
    [signal] = read_all([XID79], {"0000:3b:00": "GPU-1"})
    assert signal.result.entity == "GPU-1"


@pytest.mark.parametrize("written", ["3b:00", "0000:3B:00", "00000000:3B:00.0", "0000:3b:00.0"])
def test_every_way_to_write_an_address_is_one_address(written: str) -> None:
    assert address(written) == "0000:3b:00"


def test_the_same_code_of_the_same_gpu_is_one_fault_for_three_minutes_and_13_for_fifteen_seconds() -> None:
    def at(seconds: float, code: int) -> str:
        return f"[{seconds:.6f}] NVRM: Xid (PCI:0000:3b:00): {code}, pid=1, x"

    assert len(told(at(0, 95), at(60, 95), at(179, 95))) == 1
    assert len(told(at(0, 95), at(60, 95), at(181, 95))) == 2
    assert len(told(at(0, 13), at(14, 13), at(16, 13))) == 2
    assert len(told(at(0, 95), at(1, 79), at(2, 95).replace("3b", "3c"))) == 3


def test_a_flood_of_one_fault_is_told_every_three_minutes_and_not_every_line() -> None:
    lines = [f"[{i / 1000:.6f}] NVRM: Xid (PCI:0000:3b:00): 95, pid=1, Uncontained" for i in range(400_000)][::20]
    assert len(told(*lines)) == 3


def test_cleanup_after_another_fault_says_what_it_follows() -> None:
    cause = "[10.0] NVRM: Xid (PCI:0000:3b:00): 48, pid=1, DBE"
    follows = "[11.0] NVRM: Xid (PCI:0000:3b:00): 45, pid=1, Ch 00000008"
    [_, after] = read_all([cause, follows])
    assert (after.result.severity, "follows XID 48" in after.result.detail) == ("info", True)
    assert "Fabric Manager" in one(follows).result.detail


def test_lines_that_add_to_a_double_bit_error_do_not_count_twice() -> None:
    cause = "[10.0] NVRM: Xid (PCI:0000:3b:00): 48, pid=1, DBE"
    detail = "[10.1] NVRM: Xid (PCI:0000:3b:00): 171, pid=1, DRAM"
    assert [value for _, value, _ in told(cause, detail)] == [48.0]
    assert [value for _, value, _ in told(detail)] == [171.0]


def test_xid_154_carries_the_action_and_takes_the_blame_from_its_neighbour() -> None:
    cause = "[10.0] NVRM: Xid (PCI:0000:3b:00): 31, pid=1, MMU Fault"
    action = "[10.4] NVRM: Xid (PCI:0000:3b:00): 154, changed from 0x0 (None) to 0x1 (GPU Reset Required)"
    [_, carried] = read_all([cause, action])
    assert (carried.result.severity, carried.result.action, carried.result.blame) == ("degraded", "reset_gpu", "user")
    assert one(action).result.blame == "unknown"


EXAMPLES = [
    ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up", "sxid", "degraded"),
    ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32 egress", "sxid", "info"),
    ("NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x24:0xffff:1211)", "gpu_init", "degraded"),
    ("NVRM: API mismatch: the client has the version 535.54.03, but", "driver_mismatch", "info"),
    ("pcieport 0000:16:01.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Tx", "pcie_aer", "degraded"),
    ("nvidia 0000:18:00.0: AER: PCIe Bus Error: severity=Uncorrectable (Non-Fatal), type=Tx", "pcie_aer", "degraded"),
    ("pcieport 0000:16:01.0: AER: Uncorrected (Fatal) error received: 0000:18:00.0", "pcie_aer", "degraded"),
    ("pcieport 0000:00:01.0: AER: Uncorrectable (Non-Fatal) error message received", "pcie_aer", "degraded"),
    ("pcieport 0000:16:01.0: PCIe Bus Error: severity=Corrected, type=Physical Layer", "pcie_aer_corrected", "info"),
    ("Memory cgroup out of memory: Killed process 4711 (python3) total-vm:1kB", "oom_kill", "info"),
    ("Out of memory: Killed process 4711 (python3) total-vm:1kB", "oom_kill", "info"),
    ("blk_update_request: I/O error, dev nvme0n1, sector 2048 op 0x0:(READ)", "io_error", "suspect"),
    ("Buffer I/O error on dev sda1, logical block 3, async page read", "io_error", "suspect"),
    ("nvme nvme0: controller is down; will reset: CSTS=0xffffffff", "io_error", "suspect"),
    ("EXT4-fs (nvme0n1p2): Remounting filesystem read-only", "read_only", "degraded"),
    ("nfs: server store-3 not responding, still trying", "mount_stuck", "suspect"),
    ("INFO: task nvidia-smi:812 blocked for more than 120 seconds.", "hung_task", "suspect"),
    ("EDAC MC0: 1 UE memory read error on CPU_SrcID#0", "memory_uncorrectable", "suspect"),
    ("mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 5: be00000000800400", "machine_check", "suspect"),
    ("mlx5_core 0000:5e:00.0: device's health compromised - reached miss count", "nic_health", "degraded"),
    ("mlx5_core 0000:5e:00.0 ens1: Link down", "nic_link", "suspect"),
    ("pt_main_thread[25]: segfault at 7f ip 00007f sp 00007f error 4 in libnccl.so.2[7f7c+d3]", "segfault", "info"),
    ("Feb 23 16:24:18 gpu-07 systemd[1]: Reloading.", "daemon_reload", "info"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "check", "severity"), EXAMPLES)
def test_what_else_a_kernel_says_of_its_node(line: str, check: str, severity: str) -> None:
    signal = one(line)
    assert (signal.result.check, signal.result.severity) == (check, severity)
    assert "{" not in signal.result.detail


def test_who_went_over_its_own_limit_is_told_from_a_node_that_ran_full() -> None:
    own, node = (one(line).result.blame for line, check, _ in EXAMPLES if check == "oom_kill")
    assert (own, node) == ("user", "unknown")


@pytest.mark.parametrize(
    "line",
    [
        "6,3964,206764307,-;nvidia-nvswitch2: open (major=510)",
        "6,3973,227986636,-;IPv6: ADDRCONF(NETDEV_CHANGE): eth0: link becomes ready",
        " SUBSYSTEM=pci",
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  535.54.03",
        "blk_update_request: I/O error, dev fd0, sector 0",
        "Buffer I/O error on dev sr0, logical block 0",
        "mlx5_core 0000:5e:00.0 ens1: Link up",
        "nfs: server store-3 OK",
        "NVRM: Rate limiting GSP RPC error prints for GPU at PCI:0000:10:00 (printing 1 of every 30).",
        "",
    ],
)
def test_what_kernels_say_in_normal_use_is_no_finding(line: str) -> None:
    assert read_all([line]) == []


def test_every_row_of_the_line_catalogue_has_a_source_and_an_example() -> None:
    for row in rows("kernel_lines.toml", "line"):
        assert row["source"]
        if "EXT4-fs error" not in row["pattern"]:
            assert any(re.search(row["pattern"], line) for line, _, _ in EXAMPLES), row["pattern"]


@given(st.text(max_size=300))
def test_no_line_breaks_the_reader(line: str) -> None:
    read(KernelLog(), line)
