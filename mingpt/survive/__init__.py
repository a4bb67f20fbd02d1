"""distributed.survive: a run that continues when processes are lost, and takes in those that come back.

supervisor  the parent of each trainer, which starts it again
launch      how a process becomes a supervisor, or a trainer with a context
liveness    which other processes are alive
membership  which processes take part: views, decided one after another
view_group  the process group of a view
context     collectives that end when the view does
catch_up    the newest state of the members of a new view, on all of them
loop        the training loop, which forms a new view and continues
"""
