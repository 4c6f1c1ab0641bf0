"""Puts this folder into the path: tests of all folders share `trainings`."""
