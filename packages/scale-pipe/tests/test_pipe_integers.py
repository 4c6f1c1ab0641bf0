"""Integers as users give them."""
