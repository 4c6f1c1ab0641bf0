"""The programs are run by the tests, in environments of their own."""

collect_ignore = ["programs"]
