"""A pipeline over several processes: each rank holds some stages, and follows its list of the schedule."""
