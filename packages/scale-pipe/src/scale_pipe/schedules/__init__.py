"""The pure half: schedules as data, what builds, proves, simulates and draws them. Nothing here needs a tensor."""
