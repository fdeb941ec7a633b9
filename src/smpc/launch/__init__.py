"""`smpc run`: starts the ranks of a job, passes their output on, and ends all of them when one fails."""
