"""The only room that calls out over HTTP."""
