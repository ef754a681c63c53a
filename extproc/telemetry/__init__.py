"""Listeners on what happened; deciding code never imports them."""
