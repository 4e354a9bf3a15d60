{{/* What values.schema.json cannot say, because it compares values. */}}
{{- define "pdserve.checks" -}}
{{- $workers := .Values.workers -}}
{{- $count := add $workers.prefill $workers.decode -}}
{{- $gpus := int $workers.resources.gpus -}}
{{- $ranks := int $workers.tensorParallel -}}
{{- $pods := int $workers.pods -}}
{{- if and (eq $workers.device "cuda") (lt $gpus $ranks) -}}
{{- fail (printf "workers.resources.gpus: is %d, expected at least workers.tensorParallel (%d)" $gpus $ranks) -}}
{{- end -}}
{{- if and $gpus (ne $workers.device "cuda") -}}
{{- fail "workers.resources.gpus: needs workers.device: cuda" -}}
{{- end -}}
{{- if and $gpus (not .Values.autoscaling.enabled) (lt (mul $pods (div $gpus $ranks)) $count) -}}
{{- fail (printf "workers: %d workers of %d GPUs do not fit on %d pods of %d GPUs" $count $ranks $pods $gpus) -}}
{{- end -}}
{{- if and (eq $workers.device "cuda") (eq .Values.model.path "/models/bundled") -}}
{{- fail "model.path: workers on GPUs need a checkpoint of yours (values/gpu.yaml)" -}}
{{- end -}}
{{- if gt (int .Values.router.minReplicas) (int .Values.router.maxReplicas) -}}
{{- fail "router.minReplicas: is greater than router.maxReplicas" -}}
{{- end -}}
{{- with .Values.autoscaling -}}
{{- if and .enabled (or (lt (int $count) (int .minWorkers)) (gt (int $count) (int .maxWorkers))) -}}
{{- fail (printf "autoscaling: %d workers at the start, expected %v to %v (minWorkers to maxWorkers)" $count .minWorkers .maxWorkers) -}}
{{- end -}}
{{- if and .enabled $.Values.keda.enabled -}}
{{- fail "keda.enabled: expected false beside autoscaling.enabled, which changes the number of workers too" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (lt (int (include "pdserve.workersOfPod" .)) 1) -}}
{{- fail "workers.resources: hold no worker; a pod needs workers.threads CPUs, and a GPU for each of workers.tensorParallel ranks" -}}
{{- end -}}
{{- with .Values.keda -}}
{{- if gt (int .minWorkers) (int .maxWorkers) -}}
{{- fail "keda.minWorkers: is greater than keda.maxWorkers" -}}
{{- end -}}
{{- if and .enabled (not .decode.name) -}}
{{- fail "keda.decode.name: is empty, expected the workload of your decode workers" -}}
{{- end -}}
{{- end -}}
{{- if and (not .Values.autoscaling.enabled) (ge (int $workers.minAvailable) (int $workers.pods)) (gt (int $workers.pods) 1) -}}
{{- fail "workers.minAvailable: must be less than workers.pods, or no node of theirs can be drained" -}}
{{- end -}}
{{- end -}}
