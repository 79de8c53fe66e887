"""The tiers of tests: scripts/test runs two of them at each commit, scripts/proofs the long ones by name."""
