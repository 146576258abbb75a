"""The engine as a rollout of verl: its plugin, the server of a replica, the trainer's side."""
