"""Development: trainings followed here from start to end, what other papers saw in them beside what we see."""
