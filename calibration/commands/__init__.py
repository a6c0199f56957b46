"""The commands, one module each: `add` describes its options, `run` does it. Heavy imports are inside `run`."""

from calibration.commands import guard, heads, map, modality, plan, precision, report, sensitivity, tune

COMMANDS = (sensitivity, precision, heads, map, modality, plan, guard, tune, report)
