"""The inner loops of the bound of pipelines made of runs, compiled."""

import numpy as np

from partition.estimates.arrays import Floats, Places, Singles
from partition.estimates.compiled import compiled

EXACT = 1 - 1e-6  # of seconds that are needed, for rounding, in single precision too


@compiled
def needed_s(times: Floats, stages_s: Floats, sums_s: Floats, width: int, widest: int) -> Singles:
    """Return the least seconds of runs for some samples: [what, devices, start, stop].

    A dynamic programme over the cuts of a run:

        state       (devices, start, stop): the first stages of a run from `start` on
        label       the most seconds of a stage: the run's forwards in front of it, its work, and what comes
        behind
        transition  one more stage, behind the others
        complexity  devices x layers^3

    what: behind a stage are 0: the run's backwards of the stages in front of it; 1: these, or the sums of the
    run up to it that its last backward leaves over, whichever takes longer. times: of the layers in front of
    each place: last backward, forward, backward, optimizer. stages_s: of stages, from a first forward to a
    last backward. sums_s: of
    layers [start, stop). widest: devices that there is room for in the table.
    """
    last, forward, backward, optimizer = times
    num_layers = len(last) - 1
    need = np.full((2, widest + 1, num_layers + 1, num_layers + 1), np.inf, np.float32)
    for start in range(num_layers):
        for stop in range(start + 1, num_layers + 1):
            for place in range(stop - 1, start - 1, -1):
                work_s = stages_s[place, stop] + optimizer[stop] - optimizer[place]
                if work_s == np.inf:
                    break  # a longer stage does not fit either
                work_s += forward[place] - forward[start]
                back_s = backward[place] - backward[start]
                plain_s = (work_s + back_s) * EXACT
                left_s = sums_s[start, stop] - last[stop - 1] + last[place]
                summed_s = (work_s + max(back_s, left_s)) * EXACT
                if place == start:
                    need[0, 1, start, stop], need[1, 1, start, stop] = plain_s, summed_s
                else:
                    for devices in range(2, width + 1):
                        for what in range(2):
                            own_s = plain_s if what == 0 else summed_s
                            both_s = max(own_s, need[what, devices - 1, start, place])
                            need[what, devices, start, stop] = min(need[what, devices, start, stop], both_s)
    return need


@compiled
def least_price(
    kinds: Floats,
    need: Singles,
    times: Floats,
    each_s: Floats,
    card_s: Floats,
    links_s: Floats,
    limits: Floats,
) -> tuple[float, Places, Floats]:
    """Return the least price of a pipeline for some samples, and its runs; inf if none is below a limit.

    A dynamic programme over runs, from the first layer on:

        state       (layer, whether they are on the node that all pipelines pass, bucket of the path's
                    seconds): the runs in front of the layer
        label       the least of each of: seconds of the path, those of its forwards, price; so labels of a
                    bucket bound all its pipelines
        transition  a run (kind of node, devices, stop) that is in time behind that path
        complexity  layers^2 x buckets x kinds x devices

    kinds: by [kind, what], price of a device, of a second of the card, of a second of sums, least and most
    times that sums move its bytes, devices of a node, whether a run may be the whole model, and whether it
    is the node that all pipelines pass. need: `needed_s` by [kind, ...].
    times: by [kind, what, place], as there, and the seconds of own sums. card_s: of the samples at the ends
    of a run, by [kind, start, stop]. links_s: of a message forward, and of both, in front of each layer.
    limits: (step, samples, price, buckets, whether samples are so many that a longer last stage takes longer,
    whether there is a node that all pipelines pass).
    Runs come back by [start, kind, devices] from the last one on, with the seconds of their sums.
    """
    num_kinds, num_layers = len(kinds), card_s.shape[1] - 1
    step_s, samples, limit, buckets, many = limits[0], limits[1], limits[2], int(limits[3]), limits[4] > 0
    states = 2 * (buckets + 1)  # of a layer: not yet on the node that all pipelines pass, and behind that
    path = np.full((num_layers + 1, states, 3), np.inf)  # seconds, of forwards, price
    came = np.full((num_layers + 1, states, 4), -1)  # start, state, kind, devices
    moved = np.zeros((num_layers + 1, states))
    path[0, 0] = 0.0
    for start in range(num_layers):
        for state in range(states):
            before_s, ahead_s, price = path[start, state]
            if price >= limit:
                continue
            for kind in range(num_kinds):
                each, card, sums, least, most, width, whole, passed = kinds[kind]
                last, forward, backward, optimizer, own = times[kind]
                for devices in range(1, int(width) + 1):
                    far = start
                    if devices > 1:
                        for place in range(num_layers, start, -1):
                            if (
                                need[kind, 0, devices - 1, start, place] + before_s <= step_s
                                and need[kind, 1, devices - 1, start, place] + ahead_s <= step_s
                            ):
                                far = place
                                break
                        if far == start:
                            continue
                    for stop in range(start + devices, num_layers + 1):
                        if need[kind, 0, devices, start, stop] + before_s > step_s:
                            continue
                        if need[kind, 1, devices, start, stop] + ahead_s > step_s:
                            continue
                        if whole == 0 and start == 0 and stop == num_layers:
                            continue
                        bytes_s = own[stop] - own[start]
                        sums_s = least * bytes_s
                        if sums > card:
                            place, room_s = min(far, stop - 1), 0.0
                            first = place if many else start + devices - 1
                            for cut in range(first, place + 1):
                                taken_s = samples * each_s[kind, cut, stop] + optimizer[stop] - optimizer[cut]
                                taken_s += forward[cut] - forward[start] - last[stop - 1] + last[cut]
                                room_s = max(room_s, step_s - ahead_s - taken_s * EXACT)
                            sums_s = max(sums_s, min(most * bytes_s, room_s))
                        total = price + devices * each + card * card_s[kind, start, stop]
                        total += devices / width * (sums_s * (card - sums) + 2 * sums * bytes_s)
                        if total >= limit:
                            continue
                        reached_s = (
                            before_s + forward[stop] - forward[start] + backward[stop] - backward[start]
                        )
                        on_s = ahead_s + forward[stop] - forward[start]
                        if stop < num_layers:
                            reached_s += links_s[1, stop]
                            on_s += links_s[0, stop]
                        into = int(reached_s / step_s * buckets)
                        if into > buckets:
                            continue
                        if passed > 0 or state > buckets:
                            into += buckets + 1
                        if total < path[stop, into, 2]:
                            path[stop, into, 2] = total
                            came[stop, into] = (start, state, kind, devices)
                            moved[stop, into] = sums_s
                        path[stop, into, 0] = min(path[stop, into, 0], reached_s)
                        path[stop, into, 1] = min(path[stop, into, 1], on_s)
    first = buckets + 1 if limits[5] > 0 else 0
    best = first + int(path[num_layers, first:, 2].argmin())
    runs, at, sums_of = np.zeros((num_layers, 4), np.int64), num_layers, np.zeros(num_layers)
    count = 0
    least_found = path[num_layers, best, 2]
    while at > 0 and least_found < np.inf:
        start, state, kind, devices = came[at, best]
        runs[count], sums_of[count] = (start, at, kind, devices), moved[at, best]
        at, best, count = start, state, count + 1
    return least_found, runs[:count], sums_of[:count]
