"""``asp probe``: what can be reached from inside a sandbox. The program is :mod:`asp.probe.program`; start at ``probing``."""

from asp.probe.probing import probe as probe
from asp.probe.report import Check as Check
from asp.probe.report import Report as Report
from asp.probe.report import Verdict as Verdict
from asp.probe.targets import Origin as Origin
from asp.probe.targets import Target as Target
from asp.probe.targets import parse as parse
