{{/* Parts that several pods share. Arguments are lists, of which the root context is the first. */}}

{{- define "pdserve.owner" -}}
app.kubernetes.io/name: pdserve
app.kubernetes.io/part-of: pdserve
{{- end }}

{{- define "pdserve.selector" -}}
app.kubernetes.io/name: pdserve
app.kubernetes.io/component: {{ . }}
{{- end }}

{{- define "pdserve.labels" -}}
{{ include "pdserve.selector" . }}
app.kubernetes.io/part-of: pdserve
{{- end }}

{{- define "pdserve.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* root, and the user's number for images that have no number of their own */}}
{{- define "pdserve.pod" -}}
{{- $root := first . -}}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  {{- with index . 1 }}
  runAsUser: {{ . }}
  {{- end }}
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "pdserve.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        app.kubernetes.io/component: {{ . }}
{{- end }}

{{/* whether the root file system is read-only */}}
{{- define "pdserve.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  {{- if . }}
  readOnlyRootFilesystem: true
  {{- end }}
  capabilities:
    drop: [ALL]
{{- end }}

{{- define "pdserve.resources" -}}
resources:
  requests:
    cpu: {{ .cpu | quote }}
    memory: {{ .memory }}
  limits:
    memory: {{ .memoryLimit | default .memory }}
    {{- if .gpus }}
    nvidia.com/gpu: {{ .gpus }}
    {{- end }}
{{- end }}

{{/* The workers that Ray places on a pod: it reserves a CPU for each thread, which ranks with GPUs share. */}}
{{- define "pdserve.workersOfPod" -}}
{{- $workers := .Values.workers -}}
{{- $ranks := int $workers.tensorParallel -}}
{{- $cpu := toString $workers.resources.cpu -}}
{{- $cpus := ternary (div (add (int (trimSuffix "m" $cpu)) 999) 1000) (int (ceil (float64 $cpu))) (hasSuffix "m" $cpu) -}}
{{- if int $workers.resources.gpus -}}
{{- min (div $workers.resources.gpus $ranks) (div $cpus $workers.threads) -}}
{{- else -}}
{{- div $cpus (mul $workers.threads $ranks) -}}
{{- end -}}
{{- end }}

{{/* The pods that this number of workers needs. */}}
{{- define "pdserve.pods" -}}
{{- $each := int (include "pdserve.workersOfPod" (index . 0)) -}}
{{- div (sub (add (index . 1) $each) 1) $each -}}
{{- end }}

{{- define "pdserve.secretEnv" -}}
- name: PDSERVE_TOKEN_FILE
  value: /run/secrets/pdserve/token
- name: PDSERVE_CLUSTER_SECRET_FILE
  value: /run/secrets/pdserve/cluster-secret
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ .Values.secret }}
      key: redis-password
- name: PDSERVE_REDIS
  value: redis://:$(REDIS_PASSWORD)@pdserve-redis:6379/0
{{- end }}

{{- define "pdserve.rayTokenEnv" -}}
- name: RAY_AUTH_MODE
  value: token
- name: RAY_AUTH_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .Values.secret }}
      key: ray-token
{{- end }}

{{- define "pdserve.rayEnv" -}}
# Ray asks every node for a token; a head that is given none makes one up that nobody else knows.
{{ include "pdserve.rayTokenEnv" . }}
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
# A raylet ends itself, and the workers with it, when its control plane stays away for longer.
- name: RAY_gcs_rpc_server_reconnect_timeout_s
  value: "86400"
{{- end }}

{{- define "pdserve.preStop" -}}
lifecycle:
  preStop:
    exec:
      command: [sleep, {{ .Values.preStopS | quote }}]
{{- end }}

{{/* of a router */}}
{{- define "pdserve.routerProbes" -}}
{{- if .Values.tls.enabled -}}
readinessProbe:
  tcpSocket:
    port: 50051
  periodSeconds: 2
livenessProbe:
  httpGet:
    path: /metrics
    port: 9500
    scheme: HTTPS
  periodSeconds: 10
  failureThreshold: 3
{{- else -}}
readinessProbe:
  grpc:
    port: 50051
    service: pdserve.v1.InferenceService
  periodSeconds: 2
livenessProbe:
  grpc:
    port: 50051
  periodSeconds: 10
  failureThreshold: 3
{{- end }}
{{- end }}

{{- define "pdserve.tlsArg" -}}
{{- if .Values.tls.enabled -}}
- --tls-cert=/etc/pdserve/tls/tls.crt
{{- else -}}
- --insecure # encrypt with a mesh, or enable tls
{{- end }}
{{- end }}

{{- define "pdserve.moreTlsArgs" -}}
{{- if .Values.tls.enabled }}
- --tls-key=/etc/pdserve/tls/tls.key
- --tls-ca=/etc/pdserve/tls/ca.crt
- --tls-peer-name=pdserve
{{- end }}
{{- end }}

{{- define "pdserve.otlp" -}}
{{- if .Values.observability.otlp -}}
{{ .Values.observability.otlp }}
{{- else if .Values.observability.collector.enabled -}}
pdserve-otel-collector:4317
{{- end }}
{{- end }}

{{/* root, then the volumes that the pod has besides `tmp`, of: shm (its size), secrets, model, tls, tenants */}}
{{- define "pdserve.mounts" -}}
{{- $root := first . -}}
{{- $has := rest . -}}
volumeMounts:
  {{- if has "shm" $has }}
  - name: shm
    mountPath: /dev/shm
  {{- end }}
  - name: tmp
    mountPath: /tmp
  {{- if has "settings" $has }}
  - name: settings
    mountPath: /etc/pdserve
    readOnly: true
  {{- end }}
  {{- if has "secrets" $has }}
  - name: secrets
    mountPath: /run/secrets/pdserve
    readOnly: true
  {{- end }}
  {{- if and (has "model" $has) $root.Values.model.claim }}
  - name: models
    mountPath: {{ $root.Values.model.path }}
    subPath: {{ $root.Values.model.subPath }}
    readOnly: true
  {{- end }}
  {{- if and (has "tls" $has) $root.Values.tls.enabled }}
  - name: tls
    mountPath: /etc/pdserve/tls
    readOnly: true
  {{- end }}
  {{- if and (has "tenants" $has) $root.Values.tenants.enabled }}
  - name: tenants
    mountPath: /run/secrets/pdserve-tenants
    readOnly: true
  {{- end }}
{{- end }}

{{- define "pdserve.volumes" -}}
{{- $root := first . -}}
{{- $size := index . 1 -}}
{{- $has := rest . -}}
volumes:
  {{- if has "shm" $has }}
  - name: shm
    emptyDir:
      medium: Memory
      sizeLimit: {{ $size }}
  {{- end }}
  - name: tmp
    emptyDir: {}
  {{- if has "settings" $has }}
  - name: settings
    configMap:
      name: pdserve-settings
  {{- end }}
  {{- if has "secrets" $has }}
  - name: secrets
    secret:
      secretName: {{ $root.Values.secret }}
      defaultMode: 0440
      items:
        - {key: token, path: token}
        - {key: cluster-secret, path: cluster-secret}
  {{- end }}
  {{- if and (has "model" $has) $root.Values.model.claim }}
  - name: models
    persistentVolumeClaim:
      claimName: {{ $root.Values.model.claim }}
      readOnly: true
  {{- end }}
  {{- if and (has "tls" $has) $root.Values.tls.enabled }}
  - name: tls
    secret:
      secretName: {{ $root.Values.tls.secret }}
  {{- end }}
  {{- if and (has "tenants" $has) $root.Values.tenants.enabled }}
  - name: tenants
    secret:
      secretName: {{ $root.Values.tenants.secret }}
      defaultMode: 0440
  {{- end }}
{{- end }}
