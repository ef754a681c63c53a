"""`tidegate top`: the overview in a terminal.

`tables` and `plain` make text of an overview and import nothing of a terminal's; `screen` is the application.
"""
