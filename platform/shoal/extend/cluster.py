"""Clusters, for libraries: jobs, capacity, drivers and what a cluster of this host has."""

from typing import TYPE_CHECKING

from shoal.plugins.lazy import load_on_demand

if TYPE_CHECKING:
    from shoal.cluster.admission import PlacementRequest, RunAdmission
    from shoal.cluster.attach import find_cluster, format_remote_remedy, list_clusters, state_path
    from shoal.cluster.capacity import GPU_GRAINS, gpu_share, gpus_by_host, require_gpus, wait_for_resource
    from shoal.cluster.cluster_handle import ClusterHandle, load_handle, set_environment
    from shoal.cluster.dashboard_api import connect, list_nodes, list_reservations
    from shoal.cluster.embedded_cluster import WorkerStart, start_cluster
    from shoal.cluster.growth import find_growth
    from shoal.cluster.ingress.serve_environment import haproxy_program
    from shoal.cluster.job_main import (
        RETRIED,
        RUN_ID,
        expected_run_id,
        find_dashboard_url,
        is_connected,
        job_main,
        print_too,
    )
    from shoal.cluster.jobs import JobHandle, JobStatus, list_jobs, new_submission_id, require_no_shadowing, submit
    from shoal.cluster.ports import find_free_port
    from shoal.cluster.processes import (
        Program,
        end_programs,
        find_cluster_processes,
        find_marked_processes,
        start_program,
        wait_for_programs,
    )
    from shoal.cluster.run_queue import format_needs

__getattr__ = load_on_demand(__name__)
