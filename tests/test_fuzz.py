"""The fast part of the fuzzing suite: a few inputs for every target. ``make fuzz`` is the long version."""

import pytest

from tests.fuzz._recipes import entrance
from tests.fuzz._target import GOOD
from tests.fuzz.calls import NAMES
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_end_as_they_should(name):
    target, findings = TARGETS[name], []
    target.run(target.quick, 0, findings.append)
    bad = [finding for finding in findings if finding.verdict not in GOOD]
    allowed = target.unnamed * len(findings) if all(finding.verdict == "unnamed" for finding in bad) else 0
    assert len(bad) <= allowed, bad


def test_every_public_callable_has_valid_arguments():
    assert all(entrance(name).arguments for name in NAMES)
