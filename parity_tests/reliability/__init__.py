"""Long loops that try to lose a run or to get a lie past a reader; the suite runs short ones."""
