"""What the user has decided: excluded devices, pinned layers, numbers of pipelines and devices.

forced_plans searches the plans that keep to it; device_orders lists the orders of devices that it leaves,
pinned_cuts cuts the layers with pins in place.

For others:
    forced_plans: forced_of, forced_plans, check_forced, describe, parse_pin, without
"""
