"""What an XID means follows from its row, its sub-code and what its line says; no code is ever silently ignored."""

from __future__ import annotations

from typing import get_args

import pytest

from stoker_health.catalogue import graded
from stoker_health.data import rows
from stoker_health.nvlink5 import decode
from stoker_health.recovery import announced, recovery
from stoker_health.xids import XIDS, ActionName, Blame, Role, xid
from stoker_proto import CheckResult
from stoker_proto.nodes import Severity


def told(code: int, text: str = "") -> CheckResult:
    return graded(CheckResult(check="xid", status="bad", entity="g", value=float(code), excerpt=text))


def test_every_row_has_a_source_and_known_words_only() -> None:
    for row in XIDS.values():
        assert row.source and row.meaning
        assert row.severity in get_args(Severity)
        assert row.action in get_args(ActionName)
        assert row.blame in get_args(Blame)
        assert row.role in get_args(Role)
    assert all(r["source"] for r in rows("nvlink5.toml", "rule"))


KNOWN = [
    8, 11, 13, 25, 31, 32, *range(37, 42), *range(43, 47), 48, 54, *range(60, 65), *range(66, 73), 74, *range(75, 81),
    *range(82, 87), 88, 89, *range(92, 108), 109, 110, *range(119, 122), *range(126, 138), *range(139, 173),
]  # fmt: skip


def test_every_code_of_the_reference_has_a_row() -> None:
    assert set(KNOWN) == set(XIDS)


@pytest.mark.parametrize("code", [173, 180, 999, 0])
def test_a_code_that_nobody_knows_is_suspect_and_for_inspection(code: int) -> None:
    assert (xid(code).severity, xid(code).action) == ("suspect", "inspect")


@pytest.mark.parametrize(
    ("code", "severity", "action"),
    [
        (63, "info", "none"),  # gpud and imbue: reboot; the catalogue: ignore
        (68, "info", "restart_app"),
        (69, "info", "restart_app"),
        (32, "info", "restart_app"),
        (38, "info", "none"),
        (44, "suspect", "none"),
        (121, "info", "none"),
        (109, "degraded", "reset_gpu"),  # four sources, three opinions
        (94, "suspect", "restart_app"),  # one contained error never takes the GPU away
        (160, "suspect", "none"),
        (147, "suspect", "none"),  # NVSentinel: all of 144 to 150 fatal; undecoded we only suspect
        (64, "fatal", "inspect"),
        (79, "fatal", "reboot"),
    ],
)
def test_where_sources_disagree_the_catalogue_of_the_vendor_decides(code: int, severity: str, action: str) -> None:
    result = told(code)
    assert (result.severity, result.action) == (severity, action)


@pytest.mark.parametrize("code", [13, 31, 43, 45])
def test_faults_of_applications_are_no_evidence_against_a_node_by_themselves(code: int) -> None:
    assert told(code).severity == "info"


LINK = "NVRM: Xid (PCI:0018:01:00): {code}, {unit} {level} XC0 i0 Link {link} ({info} {status} 0x00000000 0x00000000)"


@pytest.mark.parametrize(
    ("code", "unit", "level", "info", "status", "severity", "action"),
    [
        (144, "SAW_MVB", "Nonfatal", "0x00000001", "0x00000001", "info", "none"),
        (144, "SAW_MVB", "Fatal", "0x00000001", "0x00000002", "degraded", "reset_gpu"),
        (145, "RLW_REMAP", "Nonfatal", "0x00000004", "0x00000001", "suspect", "none"),  # XID 154 says what to do
        (145, "RLW_REMAP", "Fatal", "0x00000004", "0x00000040", "degraded", "reset_gpu"),
        (146, "TLW_RX/TLW_RX_PIPE1", "Fatal", "0x0000000b", "0x00000004", "degraded", "reset_gpu"),
        (147, "TREX", "Nonfatal", "0x0000000e", "0x00000001", "info", "none"),
        (148, "NVLPW_CTRL/NVLPW", "Nonfatal", "0x0000000f", "0x80000000", "info", "none"),
        (149, "NETIR_BER_EVENT", "Nonfatal", "0x00000013", "0x00000002", "info", "none"),
        (149, "NETIR_LINK_EVT", "Fatal", "0x02500011", "0x00000000", "degraded", "reset_gpu"),
        (149, "NETIR_LINK_EVT/NETIR_LINK_DOWN", "Fatal", "0x02600011", "0x00000000", "info", "none"),  # software
        (150, "MSE_WATCHDOG", "Fatal", "0x00000000", "0x00000000", "degraded", "reset_gpu"),
        (149, "NETIR_NEW_UNIT", "Fatal", "0x03f0007f", "0x00000000", "suspect", "none"),  # no rule: not fatal
    ],
)
def test_nvlink_errors_are_decoded_by_unit_sub_code_and_status(
    code: int, unit: str, level: str, info: str, status: str, severity: str, action: str
) -> None:
    text = LINK.format(code=code, unit=unit, level=level, link="08", info=info, status=status)
    result = told(code, text)
    assert (result.severity, result.action) == (severity, action)
    assert unit.split("/")[0].split("_")[0] in result.detail
    assert "link 8" in result.detail


def test_a_unit_that_a_driver_renamed_is_found_by_its_number() -> None:
    text = LINK.format(code=150, unit="MSE_SOMETHING", level="Fatal", link="-1", info="0x00000000", status="0x00000000")
    decoded = decode(150, text)
    assert decoded is not None
    assert (decoded.unit, decoded.action, decoded.link) == ("MSE_WATCHDOG", "reset_gpu", -1)


@pytest.mark.parametrize(
    ("words", "severity", "action"),
    [
        ("0x0 (None) to 0x1 (GPU Reset Required)", "degraded", "reset_gpu"),
        ("0x0 (None) to 0x2 (Node Reboot Required)", "degraded", "reboot"),
        ("0x1 (GPU Reset Required) to 0x0 (None)", "info", "none"),
        ("0x0 (None) to 0x3 (Drain P2P)", "degraded", "drain"),
        ("0x0 (None) to 0x4 (Drain and Reset)", "degraded", "reset_gpu"),
        ("0x0 (None) to 0x63 (Something New)", "degraded", "inspect"),
    ],
)
def test_xid_154_carries_the_action_that_the_driver_asks_for(words: str, severity: str, action: str) -> None:
    result = told(154, f"NVRM: Xid (PCI:0000:5e:00): 154, GPU recovery action changed from {words}")
    assert (result.severity, result.action) == (severity, action)


def test_xid_154_without_its_line_is_only_a_notice() -> None:
    assert announced("154") is None
    assert told(154).severity == "info"


def test_a_recovery_action_that_nobody_knows_is_not_taken_for_none() -> None:
    assert (recovery(42).severity, recovery(42).action) == ("degraded", "inspect")
