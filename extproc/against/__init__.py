"""`tidegate check --against URL`: a running Envoy, compared with what the settings would render.

`dump` reads what Envoy's admin interface tells, `comparing` compares plain data as Envoy means it, `managers` and
`clusters` know what matters where, `command` puts it together.
"""
