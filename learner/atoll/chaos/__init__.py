"""`atoll chaos`: kills, pauses and restarts the processes of a local deployment, and says what that cost."""
