"""Owns: the `headrace` command.
Takes → gives: arguments → calls of the packages below.
Does not know: anything else.
Invariant: an error is one line that says what to do; Ctrl-C works everywhere.
Where does my change go: a command.
"""
