"""Plans within what the user has decided: stages that devices must hold, numbers of pipelines and devices.

Others use `forced_plans`, and `without`, `parse_pin`, `forced_of`, `check_forced` and `describe`, which read,
check and name what is decided.
"""
