"""`headrace chaos`: a real fleet, a schedule of faults made from a seed, and a judgement by sources outside Headrace.

It is a package of its own because nothing else in `deploy` may depend on it: a fleet runs without it.

    schedule   what happens when, made from the seed alone
    trial      starts the fleet, injects the schedule, drains
    faults     how each kind of fault is injected and undone
    relay      a relay of Unix sockets, so that a link can be cut without root
    truth      an env that writes one byte a step, and the reading of these files
    recorder   a learner that records the batches it gets
    history    the judgement of that record
    checks     all judgements together
"""
