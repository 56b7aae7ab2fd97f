"""A cluster in virtual time, to play thousands of fault schedules against the real controller.

:class:`~tests.simulation.schedule.Schedule` says who dies and at which moment of its life,
:func:`~tests.simulation.cluster.play` runs the controller, the recovery policy and the data ledger against it, and
:func:`~tests.simulation.invariants.broken` names what must never happen and did. ``python -m tests.simulation`` plays
many thousands.
"""
