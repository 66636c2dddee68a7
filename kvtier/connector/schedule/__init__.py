"""What the scheduler half is made of: requests, groups, lookups, loads, stores and jobs."""
