"""Moving bytes to GPUs: pinned memory, a stream for each device, and events instead of waiting for all it does."""

from tensorferry.execute.device.executor import DeviceExecutor, any_on_devices
from tensorferry.execute.device.streams import Accelerator, Cuda

__all__ = ["Accelerator", "Cuda", "DeviceExecutor", "any_on_devices"]
