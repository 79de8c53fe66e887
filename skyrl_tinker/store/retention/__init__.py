"""Rules that bound the database, each as a slice of one transaction, so that other writers hardly wait.

In: times before which rows are old. Out: True if there may be more to delete. `row_purges` go by the age of a
row, `session_purges` by the end of its session. Imports `store` and its `database`.
"""
