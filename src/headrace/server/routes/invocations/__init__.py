"""SageMaker: `/ping` and `/invocations`."""
