"""The commands, one module each: `add` describes its options, `run` does it. Heavy imports are inside `run`."""

from calibration.commands import guard, heads, map, modality, perception, plan, precision, report, sensitivity, tune

COMMANDS = (sensitivity, precision, heads, map, modality, perception, plan, guard, tune, report)
