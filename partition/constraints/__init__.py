"""What the user has decided: pinned layers, numbers of pipelines and devices. Not a search of its own.

A pinned device is a class of its own, whose only stage are its layers (estimates), so that all programmes and
searches keep to it. wishes reads what is wished for and refuses what contradicts itself; wished_sets says
which sets of pipelines respect it, and what that means for the linear programme over pipelines;
dealt_devices arranges devices in so many pipelines, to begin with.

For others:
    wishes: forced_of, check_forced, describe, parse_pin; wished_sets: WishedSets
    dealt_devices: dealt, NUMBERS
"""
